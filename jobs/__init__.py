"""The command line, job files, the pairs that ship with the project, and how they were trained."""
