"""What Millstream needs on a machine, checked."""
