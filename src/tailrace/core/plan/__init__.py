"""A change stream before it runs: parameters, server profiles, the checked plan, and what a running one may ask for."""
