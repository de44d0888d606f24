"""The `kvjax` command: one module a subcommand, each with `main(argv) -> exit code`."""
