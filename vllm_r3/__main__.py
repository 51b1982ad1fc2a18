"""`python -m vllm_r3` is `vllm-r3`."""

import sys

from vllm_r3.cli import main

if __name__ == "__main__":
    sys.exit(main())
