//! The code that runs inside a task: executes a script of operations and knows nothing else.

