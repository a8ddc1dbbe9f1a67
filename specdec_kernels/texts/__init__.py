"""The texts of requests on the device, and drafts from what followed the end of a request in them before.

The store holds whole texts, prompt and answer, of the running requests and of the latest ones that have ended, and
perhaps a corpus. It is no index: the texts need no upkeep beyond writing the new tokens. Each step reads every text
once and compares it with the ends of the requests. N-grams of any length are found. Two drafters read the store: n-gram
drafting and suffix drafting. They differ in the order of their drafts.

Life of a text. Every row of the engine has a text. A row that begins a new request exchanges its text, now that of a
request that has ended, for the oldest of those that are kept. So a request keeps its text however it ended, until as
many others as are kept have ended after it. A corpus is cut into texts that no row ever gets.

Matching. The end of a request matches at position p of a text with length m if the last m tokens of the request stand
there, up to p, and not one more (m is at most `window`). The `matches` longest matches with a token behind them are
kept; of equal ones first those in the request's own text, then in the latest text, then at the latest position.

Drafting. What followed the kept matches is merged into a trie. A node at depth d gets a confidence, and the tree is the
nodes of the largest confidence, as many as fit; of equal ones the shallower first, then that of the better match. What
has held for m tokens is taken to hold for d more with probability m / (m + d).

- `latest` (n-gram drafting): m is that of the best match that leads to the node. Each better sibling of the node or of
  one above it, 3 at most of each, takes an eighth away. The latest continuation of the longest match comes first,
  however often others followed.
- `frequent` (suffix drafting): m is that of the longest match. Each match votes with the weight 4^(m - longest), or not
  at all below 4^-8, and the share of the votes that a node has is a factor of its confidence.

Weights are integers, and confidence is compared as an integer, so the tree does not depend on the order of execution.
`strength` is the sum of the confidence of all drafts: with `frequent`, the number of accepted drafts that is expected.

An insertion is two launches at every size, and a match seven at most and a fill. The texts are read once for all
requests together: the time of a match grows with the tokens of the texts and with the places where the last tokens of
requests stand, not with the product of tokens and requests. What was found takes 8 bytes for each token that the store
has room for, 16 with many requests, during a match.

Sources: prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) and the n-gram drafters of vLLM and SGLang for
`latest`; SuffixDecoding (arXiv 2411.04975) for `frequent`: trees grown by frequency over the request and earlier
outputs, speculation in proportion to the length of the match.
"""

from specdec_kernels.texts.api import insert_texts, match_texts
from specdec_kernels.texts.types import TextDraft, TextStore

__all__ = ["TextDraft", "TextStore", "insert_texts", "match_texts"]
