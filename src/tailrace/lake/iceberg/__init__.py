"""Lakes and tables as Iceberg tables: metadata in a catalogue in addition to Delta's log, over one set of data
files."""
