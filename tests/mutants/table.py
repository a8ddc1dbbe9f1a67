"""All mutants, family by family."""

from __future__ import annotations

from tests.mutants import acceptance, attention, compat, kv_index, kv_write, mla, ngram, tree

MUTANTS = (
    *tree.MUTANTS,
    *kv_index.MUTANTS,
    *attention.MUTANTS,
    *mla.MUTANTS,
    *kv_write.MUTANTS,
    *ngram.MUTANTS,
    *acceptance.MUTANTS,
    *compat.MUTANTS,
)
