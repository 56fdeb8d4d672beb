"""What is written: the schema, the rows, the files and the manifest of a run."""
