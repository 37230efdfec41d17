"""Programs that write parts of README.md and docs, and build the site."""
