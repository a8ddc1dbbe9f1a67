"""The questions a run can ask, one module per task. `run.run_task` runs the configured one."""
