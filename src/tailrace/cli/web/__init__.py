"""The page of ``tailrace console``: it shows, and changes nothing. Needs the extra ``console``."""
