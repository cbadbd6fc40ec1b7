// Colours, texts and searches that the timeline needs; it follows in the same script.
const INK = "#1f2733", FAINT = "#67707d", RULE = "#e3e7ec", RED = "#d92d20";
const COMPUTE = ["#9fb7d6", "#c3d3e8"], UNMERGED = "#aab2bd", LIVE = "#7a5ea8", CAP = "#b54708";
const NAMES = 118, RIGHT = 12, TITLE = 24, LANE = 22, GAP = 5, MEMORY = 74, AXIS = 22;
const FONT = "12px system-ui, sans-serif";
const MIB = 1048576;

// Neighbours in number stand far apart in hue (the golden ratio), and no bucket is red.
const hues = [];
const bucketColour = (b) =>
  (hues[b] ??= `hsl(${40 + (b * 0.618034 + 0.2) % 1 * 275} 46% ${b % 2 ? 54 : 63}%)`);

const time = (ms) =>
  ms >= 100 ? `${ms.toFixed(1)} ms` : ms >= 0.1 ? `${ms.toFixed(3)} ms` : `${(ms * 1000).toFixed(1)} µs`;
const size = (bytes) =>
  bytes >= 1024 * MIB ? `${(bytes / 1024 / MIB).toFixed(2)} GiB`
    : bytes >= MIB ? `${(bytes / MIB).toFixed(1)} MiB` : `${(bytes / 1024).toFixed(1)} KiB`;

// First place in items, sorted by key, whose key is not below value.
function lowerBound(items, value, key) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(items[middle]) < value) low = middle + 1; else high = middle;
  }
  return low;
}

// The item at a moment, or the nearest one that is not further than near.
function at(items, ms, near) {
  const i = lowerBound(items, ms, (e) => e.end);
  const candidates = [items[i], items[i - 1]].filter(Boolean);
  const gap = (e) => Math.max(e.start - ms, ms - e.end, 0);
  candidates.sort((a, b) => gap(a) - gap(b));
  return candidates.length && gap(candidates[0]) <= near ? candidates[0] : null;
}

function describe(found) {
  if (found.kernel) {
    const k = found.kernel;
    return [`${k.name} (${k.op})`, k.module, `${time(k.end - k.start)} from ${time(k.start)}`].filter(Boolean);
  }
  if (found.memory !== undefined) return [`${size(found.memory)} live`, `cap ${size(found.cap)}`];
  const f = found.flight || found.stop.flight;
  const lines = [
    `${f.name}: ${f.kind} of ${size(f.bytes)} ${f.dtype} on group ${f.group}`,
    f.label === f.kind ? "" : f.label,
    f.parameter ? `parameter ${f.parameter}` : "",
    `${time(f.start)} to ${time(f.end)}, takes ${time(f.end - f.start)}`,
    `hidden ${time(f.hidden)}, exposed ${time(f.exposed)}`,
    f.queued > 1e-6 ? `waited ${time(f.queued)} for its stream or link` : "",
    f.reason ? `exposed, because ${f.reason}` : "",
    f.hiddenBy.length ? `under it: ${f.hiddenBy.slice(0, 4).join(", ")}` : "",
  ];
  if (found.stop) lines.unshift(`compute stands still for ${time(found.stop.end - found.stop.start)}`);
  return lines.filter(Boolean);
}
