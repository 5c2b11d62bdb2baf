"""Where entries and documents come from: servers, archives and copies."""
