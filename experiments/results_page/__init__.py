"""docs/results.md, made from measured rows.

The page is the files of `sections`, one behind the other. They are Markdown. A fenced block of the language `rows`
becomes a table of committed rows, and one of the language `made` the line that says where rows come from.
"""
