"""``python -m ecospec.harness``: the same command as ``ecospec-bench``, for launchers such as torchrun."""

from ecospec.harness.cli import main

if __name__ == "__main__":
    main()
