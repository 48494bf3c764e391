"""The command line: one file per command, flags shared in `options`, all text to a terminal through `render`."""
