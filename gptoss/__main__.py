"""`python -m gptoss` is the command line."""

from gptoss.cli import main

if __name__ == "__main__":
    main()
