"""The questions that a run can answer, one module per task. `run.run_task` runs the configured one."""
