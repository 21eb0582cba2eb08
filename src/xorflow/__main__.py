"""`python -m xorflow`."""

from xorflow.cli import main

if __name__ == "__main__":
    main()
