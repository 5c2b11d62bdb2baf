"""Checks that users can run on stores and handlers of their own."""
