"""RUN it: argv, the process and its keeper, waiting, state, and the gates before all that."""
