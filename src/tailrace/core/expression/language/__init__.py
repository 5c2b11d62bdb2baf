"""What operators are written with: the registry, compiled expressions and regular expressions."""
