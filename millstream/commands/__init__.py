"""One file a command; `millstream.cli` imports the one that is called."""
