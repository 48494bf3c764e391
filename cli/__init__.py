"""The command line: one file per command, flags shared in `options`, terminal text through `render`."""
