"""Lakes and tables as Iceberg tables: metadata in a catalogue beside Delta's log, over one set of data files."""
