"""The results of a run: metrics, tables, pages, its folder and its wandb record."""
