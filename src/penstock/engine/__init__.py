"""The engine room."""

import os

# Read when torch loads OpenMP, so it stands before any import of torch. Threads that spin while they wait make a
# step many times slower as soon as another process wants a core; a value the user has set is left alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
