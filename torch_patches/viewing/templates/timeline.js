// Draws the runs before and after on canvases that share one view of time.  The data come from the
// JSON beside; texts reach the page by textContent and fillText only, never as markup.
class Run {
  constructor(data, names, groups, cap) {
    this.total = data.total;
    this.cap = cap;
    this.title = data.title;
    this.kernels = data.kernels.map(([start, end, name, op, module]) =>
      ({ start, end, name: names[name], op: names[op], module: names[module], shade: 0 }));
    let shade = 0;
    this.kernels.forEach((k, i) => {
      if (i && k.module !== this.kernels[i - 1].module) shade ^= 1;
      k.shade = shade;
    });
    this.flights = data.flights;
    this.stops = data.stops.map(([start, end, flight]) => ({ start, end, flight: data.flights[flight] }));
    this.memory = data.memory;
    this.lanes = groups.map((group) => ({
      group,
      flights: this.flights.filter((f) => f.group === group).sort((a, b) => a.start - b.start),
      stops: this.stops.filter((s) => s.flight.group === group),
    }));
    this.most = Math.max(cap, this.memory.reduce((most, p) => Math.max(most, p[1]), 0)) * 1.06;
  }
  get height() {
    return TITLE + LANE + GAP + this.lanes.length * (LANE + GAP) + MEMORY + AXIS + 4;
  }
}

class Timeline {
  constructor(sheet, data) {
    this.holder = sheet.querySelector(".timeline");
    this.tip = sheet.querySelector(".tip");
    this.detail = sheet.querySelector(".detail");
    this.runs = data.runs.map((run) => new Run(run, data.names, data.groups, data.cap));
    this.longest = Math.max(...this.runs.map((run) => run.total), 1e-6);
    this.shortest = Math.min(...this.runs.map((run) => run.total));
    this.canvases = this.runs.map((run, i) => {
      const canvas = document.createElement("canvas");
      canvas.tabIndex = 0;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${run.title}; the tables below have the figures`);
      this.holder.append(canvas);
      this.listen(canvas, run);
      return canvas;
    });
    this.selected = null; // a bucket, or a flight without one
    this.frames = 0;
    this.width = 300; // of the canvases in CSS pixels; asking the page each time is slow
    this.reset();
    sheet.querySelectorAll("[data-zoom]").forEach((button) =>
      button.addEventListener("click", () => this.command(button.dataset.zoom)));
    new ResizeObserver(() => this.request()).observe(this.holder);
  }

  // -- view ------------------------------------------------------------------------------------

  reset() { this.from = 0; this.to = this.longest * 1.005; this.request(); }

  show(from, to) {
    const span = Math.min(Math.max(to - from, this.longest * 1e-7), this.longest * 1.2);
    const low = -0.02 * this.longest, high = this.longest * 1.02;
    from = Math.min(Math.max(from, low), Math.max(high - span, low));
    this.from = from;
    this.to = from + span;
    this.request();
  }

  // Of what both runs have in view: the middle of the longer one may be behind the other's end.
  middle() {
    return (this.from + (this.shortest > this.from ? Math.min(this.to, this.shortest) : this.to)) / 2;
  }

  zoom(factor, at = this.middle()) {
    this.show(at - (at - this.from) / factor, at + (this.to - at) / factor);
  }

  pan(share) { const by = (this.to - this.from) * share; this.show(this.from + by, this.to + by); }

  command(name) {
    if (name === "in") this.zoom(1.5);
    else if (name === "out") this.zoom(1 / 1.5);
    else if (name === "left") this.pan(-0.2);
    else if (name === "right") this.pan(0.2);
    else if (name === "all") this.reset();
  }

  x(ms) { return NAMES + (ms - this.from) / (this.to - this.from) * (this.width - NAMES - RIGHT); }
  ms(x) { return this.from + (x - NAMES) / (this.width - NAMES - RIGHT) * (this.to - this.from); }

  // -- events ----------------------------------------------------------------------------------

  listen(canvas, run) {
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.pan((event.deltaX || event.deltaY) / 1000);
      } else {
        this.zoom(Math.exp(-event.deltaY / 400), this.ms(event.offsetX));
      }
    }, { passive: false });
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.offsetX, from: this.from, to: this.to, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) { this.hover(run, event); return; }
      const by = (held.x - event.offsetX) / (this.width - NAMES - RIGHT) * (held.to - held.from);
      held.moved = held.moved || Math.abs(held.x - event.offsetX) > 3;
      if (held.moved) { this.tip.hidden = true; this.show(held.from + by, held.to + by); }
    });
    canvas.addEventListener("pointerup", (event) => {
      if (held && !held.moved) this.select(this.find(run, event.offsetX, event.offsetY));
      held = null;
    });
    canvas.addEventListener("pointercancel", () => { held = null; });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("keydown", (event) => {
      const known = {
        ArrowLeft: "left", ArrowRight: "right", a: "left", d: "right", ArrowUp: "in", w: "in",
        "+": "in", "=": "in", ArrowDown: "out", s: "out", "-": "out", Home: "all", 0: "all",
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !known[event.key]) return;
      event.preventDefault();
      this.command(known[event.key]);
    });
  }

  hover(run, event) {
    const found = this.find(run, event.offsetX, event.offsetY);
    this.tip.hidden = !found;
    if (!found) return;
    this.tip.textContent = describe(found).join("\n");
    const box = this.holder.getBoundingClientRect();
    const left = event.clientX - box.left, tipWidth = Math.min(this.tip.offsetWidth, 460);
    this.tip.style.left = `${Math.max(0, Math.min(left + 14, box.width - tipWidth))}px`;
    this.tip.style.top = `${event.clientY - box.top + 18}px`;
  }

  select(found) {
    const flight = found && (found.flight || found.stop?.flight);
    this.selected = flight || null;
    this.detail.textContent = found ? describe(found).join("\n") : "";
    this.detail.hidden = !found;
    this.request();
  }

  find(run, x, y) {
    if (x < NAMES) return null;
    const ms = this.ms(x), near = (this.to - this.from) * 1.5 / this.width;
    const row = Math.floor((y - TITLE) / (LANE + GAP));
    if (y < TITLE) return null;
    if (row === 0) {
      const stop = at(run.stops, ms, 0);
      if (stop) return { stop };
      const kernel = at(run.kernels, ms, near);
      return kernel ? { kernel } : null;
    }
    if (row <= run.lanes.length) {
      const flight = at(run.lanes[row - 1].flights, ms, near);
      return flight ? { flight } : null;
    }
    const place = lowerBound(run.memory, ms, (p) => p[0]);
    const point = run.memory[Math.max(place - 1, 0)];
    return point ? { memory: point[1], cap: run.cap } : null;
  }

  // -- drawing ---------------------------------------------------------------------------------

  request() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = this.width = Math.max(this.holder.clientWidth, 300);
    this.runs.forEach((run, i) => {
      const canvas = this.canvases[i], height = run.height;
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
        canvas.style.width = `${width}px`;
        canvas.style.height = `${height}px`;
      }
      const c = canvas.getContext("2d");
      c.setTransform(ratio, 0, 0, ratio, 0, 0);
      c.clearRect(0, 0, width, height);
      c.font = FONT;
      c.textBaseline = "middle";
      this.drawRun(c, run);
    });
    this.frames += 1;
  }

  drawRun(c, run) {
    c.fillStyle = INK;
    c.font = `600 ${FONT}`;
    c.fillText(run.title, 0, TITLE / 2 - 1);
    c.font = FONT;
    let top = TITLE;
    this.label(c, "compute", top);
    this.clip(c, top, LANE, () => {
      this.boxes(c, run.kernels, top, LANE, (k) => COMPUTE[k.shade], (k) => k.op);
      this.boxes(c, run.stops, top, LANE, () => RED, (s) => `waits: ${s.flight.name}`, "#fff");
    });
    top += LANE + GAP;
    for (const lane of run.lanes) {
      this.label(c, `group ${lane.group}`, top);
      this.clip(c, top, LANE, () => {
        const colour = (f) => f.bucket === null ? UNMERGED : bucketColour(f.bucket);
        this.boxes(c, lane.flights, top, LANE, colour, (f) => f.label);
        this.boxes(c, lane.stops, top + LANE - 5, 5, () => RED);
        this.mark(c, lane.flights, top);
      });
      top += LANE + GAP;
    }
    this.drawMemory(c, run, top);
    this.drawAxis(c, run, top + MEMORY);
  }

  label(c, text, top) {
    c.fillStyle = FAINT;
    let shown = text;
    while (shown.length > 4 && c.measureText(shown).width > NAMES - 10) shown = `${shown.slice(0, -2)}…`;
    c.fillText(shown, 0, top + LANE / 2);
    c.fillStyle = "#f5f7f9";
    c.fillRect(NAMES, top, this.width - NAMES - RIGHT, LANE);
  }

  clip(c, top, height, body) {
    c.save();
    c.beginPath();
    c.rect(NAMES, top - 1, this.width - NAMES - RIGHT, height + 2);
    c.clip();
    body();
    c.restore();
  }

  // Items do not overlap and are sorted.  What is narrower than a pixel shares one with its
  // neighbours, so a frame costs at most some rectangles a pixel.
  boxes(c, items, top, height, colour, text, ink = INK) {
    const scale = (this.width - NAMES - RIGHT) / (this.to - this.from), zero = NAMES - this.from * scale;
    let covered = -1;
    for (let i = lowerBound(items, this.from, (e) => e.end); i < items.length; i++) {
      const item = items[i];
      if (item.start > this.to) break;
      const left = zero + item.start * scale, right = zero + item.end * scale;
      if (right - left < 1 && Math.floor(right) === covered) continue;
      covered = Math.floor(right);
      const width = right - left > 3 ? right - left - 0.75 : Math.max(right - left, 0.9);
      c.fillStyle = colour(item);
      c.fillRect(left, top, width, height);
      if (text && width >= 30) this.write(c, text(item), ink, left, right, top + height / 2);
    }
  }

  // As much of a text as fits into a box, and no text that would be a few letters only.
  write(c, text, ink, left, right, y) {
    const from = Math.max(left, NAMES), room = Math.min(right, this.width - RIGHT) - from - 8;
    const fits = Math.floor(room / 6.4);
    if (fits < 4) return;
    c.fillStyle = ink;
    c.fillText(text.length > fits ? `${text.slice(0, fits - 1)}…` : text, from + 4, y);
  }

  // The selected launch, and what is in one bucket with it before and after.
  mark(c, flights, top) {
    const chosen = this.selected;
    if (!chosen) return;
    c.strokeStyle = INK;
    c.lineWidth = 2;
    for (const f of flights) {
      const same = chosen.bucket === null ? f.name === chosen.name : f.bucket === chosen.bucket;
      if (!same || f.end < this.from || f.start > this.to) continue;
      const left = this.x(f.start);
      c.strokeRect(left + 1, top + 1, Math.max(this.x(f.end) - left - 2, 1), LANE - 2);
    }
  }

  drawMemory(c, run, top) {
    const bottom = top + MEMORY - 4, height = MEMORY - 10;
    const y = (bytes) => bottom - bytes / run.most * height;
    c.fillStyle = FAINT;
    c.fillText("live bytes", 0, top + 14);
    c.fillText(size(run.memory.reduce((m, p) => Math.max(m, p[1]), 0)), 0, top + 30);
    c.fillStyle = CAP;
    c.fillText(`cap ${size(run.cap)}`, 0, top + 46);
    this.clip(c, top, MEMORY, () => {
      c.beginPath();
      c.moveTo(NAMES, bottom);
      const first = Math.max(lowerBound(run.memory, this.from, (p) => p[0]) - 1, 0);
      let column = -1, most = 0, last = null;
      const put = () => {
        if (last === null) return;
        c.lineTo(column, y(most));
        c.lineTo(column, y(last));
      };
      for (let i = first; i < run.memory.length; i++) {
        const [ms, bytes] = run.memory[i];
        const x = Math.max(Math.round(this.x(ms)), NAMES - 2);
        if (x !== column) {
          put();
          if (last !== null) c.lineTo(x, y(last));
          column = x; most = bytes;
        }
        most = Math.max(most, bytes);
        last = bytes;
        if (ms > this.to) break;
      }
      put();
      const end = Math.min(this.x(run.total), this.width);
      c.lineTo(end, y(last ?? 0));
      c.lineTo(end, bottom);
      c.closePath();
      c.fillStyle = "#7a5ea833";
      c.fill();
      c.strokeStyle = LIVE;
      c.lineWidth = 1.2;
      c.stroke();
      c.strokeStyle = CAP;
      c.lineWidth = 1.2;
      c.setLineDash([6, 4]);
      c.beginPath();
      c.moveTo(NAMES, y(run.cap));
      c.lineTo(this.width - RIGHT, y(run.cap));
      c.stroke();
      c.setLineDash([]);
    });
  }

  drawAxis(c, run, top) {
    const span = this.to - this.from, most = Math.max((this.width - NAMES) / 90, 2);
    let step = 10 ** Math.floor(Math.log10(span / most));
    for (const factor of [2, 2.5, 2]) if (span / step > most) step *= factor;
    const digits = Math.max(0, Math.ceil(-Math.log10(step) + (step < 1 ? 0.4 : -0.5)));
    c.strokeStyle = RULE;
    c.lineWidth = 1;
    c.textAlign = "center";
    for (let i = Math.ceil(this.from / step); i * step <= this.to; i++) {
      const x = this.x(i * step);
      if (i * step < -1e-12 || x < NAMES) continue;
      c.beginPath();
      c.moveTo(x, top - 2);
      c.lineTo(x, top + 4);
      c.strokeStyle = FAINT;
      c.stroke();
      c.fillStyle = FAINT;
      const text = `${(i * step).toFixed(digits)} ms`, half = c.measureText(text).width / 2;
      c.fillText(text, Math.min(x, this.width - half - 2), top + 12);
    }
    c.textAlign = "left";
  }
}

const timelines = [];
document.querySelectorAll("section.sheet").forEach((sheet) => {
  const text = sheet.querySelector("script[type='application/json']");
  if (text) timelines.push(new Timeline(sheet, JSON.parse(text.textContent)));
});
document.querySelectorAll("[data-bucket]").forEach((swatch) => {
  swatch.style.background = bucketColour(Number(swatch.dataset.bucket));
});
const tabs = [...document.querySelectorAll("nav [data-sheet]")];
const sheets = [...document.querySelectorAll("section.sheet")];
const choose = (name) => {
  sheets.forEach((sheet) => { sheet.hidden = sheet.id !== name; });
  tabs.forEach((tab) => tab.setAttribute("aria-pressed", String(tab.dataset.sheet === name)));
  timelines.forEach((timeline) => timeline.request());
};
tabs.forEach((tab) => tab.addEventListener("click", () => choose(tab.dataset.sheet)));
if (tabs.length > 1) choose(tabs[0].dataset.sheet);
window.timelines = timelines; // for tests, and for the curious
