"""Generated English for training: sentences that share their word pairs with a text but are new every time.

A small model learns a few megabytes by heart within some tens of passes, and then fails on any other text. Word pairs
drawn at random keep the vocabulary and local grammar and leave nothing to memorise.
"""

from collections.abc import Sequence

from replayeval.models.builtin.recall import Draws


class WordPairs:
    """A bigram model over words.

    Args:
        verses: Text to take the pairs from.
    """

    def __init__(self, verses: Sequence[bytes]) -> None:
        """Count the pairs."""
        self._starts: list[bytes] = []
        self._followers: dict[bytes, list[bytes]] = {}
        for verse in verses:
            words = verse.split()
            self._starts.append(words[0])
            for word, follower in zip(words, [*words[1:], b""], strict=True):
                self._followers.setdefault(word, []).append(follower)

    def verse(self, draws: Draws) -> bytes:
        """Return one new verse: from a word that starts verses to one that ends them, 60 words at most."""
        words = [draws.pick(self._starts)]
        while len(words) < 60:
            word = draws.pick(self._followers[words[-1]])
            if not word:
                break
            words.append(word)
        return b" ".join(words)

    def verses(self, draws: Draws, size: int) -> list[bytes]:
        """Return new verses of at least `size` bytes together."""
        made: list[bytes] = []
        total = 0
        while total < size:
            made.append(self.verse(draws))
            total += len(made[-1]) + 1
        return made
