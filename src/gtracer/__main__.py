"""`python -m gtracer` is `gtracer`."""

import os
import sys

from gtracer.cli import main

if __name__ == "__main__":
    status = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # What torch's process groups have running now and then aborts a process that ends as others do.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
