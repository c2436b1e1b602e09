"""``python -m flower_app.cli``: the command line where no ``collapipe`` is installed."""

from flower_app.cli.main import main

if __name__ == "__main__":
    main()
