"""Token histories of sequences on the device, and drafts from what followed the end of a sequence in them before.

The store holds whole histories (prompt and output tokens) of the running requests, of the latest finished ones, and
perhaps a corpus. It is no index: an update only writes the new tokens, and each step compares every history with the
ends of the requests, so n-grams of any length are found. The two orders of drafts are n-gram and suffix drafting.

Every batch slot has a history. When a slot starts a new request, its history joins a ring of K kept ones, and the slot
takes the oldest of the ring: a history stays until K other requests have finished after it. A corpus is cut into
histories that no slot ever gets.

Matching. The end of a request matches at position p of a history with length m if its last m tokens are there, up to p,
and not one more (m <= `max_ngram`). The best `max_candidates` matches that a token follows are the candidates: the
longest first, of equal ones those in the request's own history, then in the latest history, then at the latest
position. No other match counts, however often its continuation occurs.

Drafting. The continuations of the candidates are merged into a trie. Each node at depth d has a path probability, and
the tree has the most probable nodes, as many as fit; of equal ones the shallower first, then by
candidate. A continuation of a match of m tokens is taken to hold for d tokens with probability m / (m + d).

- `latest` (n-gram drafting): m is that of the best candidate through the node. Each better sibling of the node or of
  one of its ancestors, 3 at most of each, takes an eighth away. So the latest continuation of the longest match comes
  first, however often others followed.
- `frequent` (suffix drafting): m is that of the longest match. Each candidate votes with weight 4^(m - longest), or not
  at all below 4^-8, and the node's share of the votes is a factor of its probability. Only candidates vote: of more
  matches of one length than `max_candidates`, the latest.

Weights are integers and probabilities are compared as integers, so the tree does not depend on the order of execution.

Cost. An insertion is two launches at every size, a match at most seven and a fill. The time of a match grows with the
tokens of the histories and with the places where last tokens of requests occur, not with the product of tokens and
requests. A match takes 8 bytes of scratch for each token of the store, 16 with many requests.

Sources: prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) and the n-gram drafters of vLLM and SGLang for
`latest`; SuffixDecoding (arXiv 2411.04975) for `frequent`: trees grown by frequency over the request and earlier
outputs, speculation in proportion to the length of the match.
"""

from specdec_kernels.history.api import insert_histories, match_histories
from specdec_kernels.history.types import HistoryDraft, HistoryStore

__all__ = ["HistoryDraft", "HistoryStore", "insert_histories", "match_histories"]
