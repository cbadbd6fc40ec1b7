"""The stack for PyTorch: what goes where (``manifest/``), and the code that makes commits of it."""
