"""``python -m partita``: the command line."""

import sys

from partita.cli import main

if __name__ == "__main__":
    sys.exit(main())
