"""What to verify: the draft tree, expert sets, the policy contract and the built-in policies.

NumPy and pluggy only. A policy author needs to read this folder alone.
"""

if __name__ != "ecospec.policies":
    raise ImportError("import ecospec.policies, not policies (run: pip install -e .)")
