"""What a run leaves: metrics, tables, pages, its folder and its wandb record."""
