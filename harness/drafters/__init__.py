"""What can draft: the contract, the hook, and the drafters that ship with the package.

This module and `contract`, `hookspecs` and `builtin` import no torch: listing plugins stays instant.
"""
