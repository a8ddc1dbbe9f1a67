"""A device-resident store of n-grams that drafts: it proposes again what followed the last tokens before.

The store is a trie of every n-gram of at most D = `max_depth` tokens in the texts inserted. Each node, an n-gram, has
a count of its occurrences and the stamp of the last one: the running number, over all tokens ever inserted, of its last
token. After each step the newly committed tokens are inserted: for a token at position e, the n-grams of 1 to D tokens
that end at e, each once. A text inserted step by step therefore counts as if it had been inserted whole.

Matching takes the suffixes of a request's text, the longest first, and merges what followed them into one tree until
all nodes of the tree are used. With `bfs` the continuations of a suffix are walked breadth first, and each node gives
its latest `types.breadth_at(depth)` children: fewer the longer the match. With `prob` they are walked best first by the
product over the path of count / (sum of the counts of the `max_breadth` most frequent siblings); ties go to what was
seen first. These are the rules of SGLang's n-gram drafter, with three differences: SGLang counts the last D tokens anew
in each step, indexes no more of a prompt than these, and pads its trees with drafts of token 0.

The order of execution cannot change what the store holds. In one insertion every (row, window, length) is an occurrence
of one n-gram, found or created by compare-and-swap on its exact key; counts are sums and stamps are maxima of numbers
that are fixed beforehand (row after row, each row in order). A later launch writes the lists of best children; one
program writes each list, and it is the top of a set under a strict order. Only the numbers of the nodes depend on which
program came first.

Capacity: an insertion of T tokens that might not fit (live nodes + T * D > capacity) first evicts. Every node has the
number of the last insertion whose windows went through it; for a parent it is never lower than for its children. The
nodes used by the latest insertions are kept, as many insertions as fit half of the capacity; insertions more than 2,047
ago are kept or dropped together where their ages share the first 11 bits. An insertion enters at most as many tokens as
the other half is sure to hold (`NgramStore.insertion_limit`), the last ones of each row, so the store never overflows.
A window whose beginning is not in the store is not continued.

An insertion is seven launches at every size.
"""

from specdec_kernels.ngram.api import ngram_insert, ngram_match
from specdec_kernels.ngram.types import NgramDraft, NgramStore

__all__ = ["NgramDraft", "NgramStore", "ngram_insert", "ngram_match"]
