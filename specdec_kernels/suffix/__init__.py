"""Drafts from what followed the longest suffix of a request in texts that were seen before.

The store holds whole texts: prompts and answers of the running requests, and of the latest ones that have ended. It is
no index. Each step reads every text once and compares it with the end of the request, which a GPU does faster than it
follows pointers, and which needs no upkeep beyond writing the new tokens. So a suffix of any length is found, where a
trie of n-grams ends at its depth, and the store forgets by texts and not by n-grams.

Matching. The end of a request matches at position p of a text with length m if the last m tokens of the request stand
there, up to p, and not one more (m is at most `window`). The `matches` longest matches with a token behind them are
kept, at most `per_text` of one text; of equal ones first those in the request's own text, then in the latest text, then
at the latest position.

Drafting. Each kept match votes for what followed it, with the weight 4^(m - longest), or not at all below 4^-8. The
continuations are merged into a trie. The share of a node is the weight of the matches that run through it, over the
weight of all. Its confidence is its share times m / (m + depth) for a longest match of m tokens: what has held for m
tokens is taken to hold for as many more with probability one half. The tree is the nodes of the largest confidence, as
many as fit; of equal ones the shallower first, then that of the better match. A node needs a share of `min_share`, and
a depth of at most `factor` times the longest match: short matches draft little. Weights are integers, and confidence
is compared as an integer, so the tree does not depend on the order of execution.

`strength` is the sum of the confidence of all drafts, the number of accepted drafts that is expected.

Source: SuffixDecoding (arXiv 2411.04975): suffix trees of the request and of earlier outputs, trees grown by frequency,
speculation in proportion to the length of the match. There, one length of match speaks at a time; here all that are
kept do, weighted by their length.
"""

from specdec_kernels.suffix.api import suffix_insert, suffix_match
from specdec_kernels.suffix.types import SuffixDraft, SuffixStore

__all__ = ["SuffixDraft", "SuffixStore", "suffix_insert", "suffix_match"]
