"""Special tokens in what clients write: their text in a message becomes plain tokens.

A chat template writes turns as text with special tokens between them, and a message that holds the
text of one (`<|im_end|>`) would end its turn and could forge another. So before a template renders
a conversation, each such text in it is replaced by a private-use character that the conversation
does not hold (`PlainContent.mark`). All special tokens that the rendered text then has are the
template's. They become escapes, secret texts for which a second tokenizer has tokens, the
private-use characters become the texts that they stand for, and the second tokenizer, which does
not know special tokens, encodes the result. In all else it is like the first: it shares its
vocabulary.

A conversation without such texts is rendered and encoded as it is. A special token that a template
puts together from parts, of which messages hold some, is not found here.

`Tokenizer` owns one. (transformers 5.23 has a similar option, `sanitize_control_tokens`.)
"""

from __future__ import annotations

import io
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from aioinfer.errors import RequestError
from aioinfer.text.pieces import TextPieces

#: Characters that are searched at a time: other threads may run in between.
_SEARCHED = 64 * 1024
#: The supplementary private-use area A, without its noncharacters: 65 534 characters.
_PRIVATE = range(0xF0000, 0xFFFFE)
#: Random characters at the beginning of each escape.
_SECRET_LENGTH = 8
#: Random characters that are tried as placeholders.
_TRIED = 64


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered conversation.

    Attributes:
        text: the prompt as text.
        escaped: the same for `PlainContent.encode`, or None if the messages held no text of a
            special token: then `text` is encoded as any other.
    """

    text: str
    escaped: str | None = None


class PlainContent:
    """Finds special tokens in conversations, and encodes prompts in which some of them are plain
    text. Safe to use from several threads.

    Attributes:
        pieces: how long escaped texts are cut, or None if they have to be encoded whole.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        """Makes the second tokenizer of the first; they share the vocabulary."""
        added = backend.get_added_tokens_decoder()
        special = {token.content: index for index, token in added.items() if token.special}
        texts = sorted(filter(None, special), key=len, reverse=True)
        self._longest = len(texts[0]) if texts else 0
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._plain = tokenizers.Tokenizer(backend.model)
        self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        secret = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_SECRET_LENGTH))
        self._escapes: dict[str, str] = {}
        own_ids: dict[str, int] = {}
        self._skip_used_ids(secret, len(added))
        copies = []
        for index, token in sorted(added.items()):
            content = token.content
            if token.special and content:
                content = self._escapes[token.content] = f"{secret}{chr(_PRIVATE[len(own_ids)])}"
            own_ids[content] = index
            copies.append(_copy_of(token, content))
        self._plain.add_tokens(copies)
        self._new_ids: dict[int, list[int]] = {
            self._id_of(content): [index] for content, index in own_ids.items()
        }
        # A special token that the vocabulary itself finds in text is split behind its first letter.
        # (The one for unknown characters forges nothing.)
        unknown = getattr(backend.model, "unk_token", None)
        for text, index in special.items():
            if index not in self._new_ids and text != unknown:
                self._new_ids[index] = self._encode(text[:1]) + self._encode(text[1:])
        self._changes = {new for new, ids in self._new_ids.items() if ids != [new]}
        self.pieces = TextPieces.of(self._plain)

    def _skip_used_ids(self, secret: str, count: int) -> None:
        """Adds tokens until the next `count` ids are none of the vocabulary's, which may have gaps:
        the library gives new tokens the ids behind as many as the vocabulary has."""
        model, number = self._plain.model, 0
        following = self._plain.get_vocab_size(with_added_tokens=False)
        while any(model.id_to_token(following + i) is not None for i in range(count + 1)):
            filler = f"{secret}{number}"
            self._plain.add_tokens([tokenizers.AddedToken(filler, normalized=False)])
            number, following = number + 1, self._id_of(filler) + 1

    def _id_of(self, content: str) -> int:
        index = self._plain.token_to_id(content)
        if index is None:
            raise ValueError(f"{content!r} was added, and yet it is no token")
        return index

    def mark(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Returns a structure of lists and dicts in which texts of special tokens are replaced, and
        the text that each replacement stands for. With none, it is the structure itself.

        Raises `RequestError` if the structure is nested too deeply, or holds too many of the
        characters that replacements are taken from.
        """
        try:
            texts = list(_texts_in(value))
            found = sorted({match for text in texts for match in self._special_texts_in(text)})
            if not found:
                return value, {}
            # A placeholder that occurs in an escape would be replaced within it.
            used = [*texts, *self._escapes.values()]
            marks = dict(zip(_free_characters(used, len(found)), found, strict=True))
            return self._replace(value, {text: mark for mark, text in marks.items()}), marks
        except RecursionError as error:
            raise RequestError("the messages are nested too deeply", param="messages") from error

    def unmark(self, rendered: str, marks: Mapping[str, str]) -> ChatText:
        """Returns the prompt of a rendered structure that `mark` returned with these marks."""
        if not marks:
            return ChatText(rendered)
        text, escaped = rendered, self._substitute(rendered, self._escapes)
        for mark, special in marks.items():
            # also as a template writes it in JSON that is all ASCII
            for old, new in ((mark, special), (_ascii_json(mark), _ascii_json(special))):
                text, escaped = _replace_all(text, old, new), _replace_all(escaped, old, new)
        return ChatText(text, escaped)

    def encode(self, escaped: str) -> list[int]:
        """Returns the token ids of `ChatText.escaped`, or of a piece of it.

        Raises TypeError if it holds half of a surrogate pair.
        """
        ids = self._encode(escaped)
        if self._changes.isdisjoint(ids):
            return ids
        return [new for index in ids for new in self._new_ids.get(index, (index,))]

    def _encode(self, text: str) -> list[int]:
        # of the library's ways to encode, this lets other threads run, and skips offsets
        encoded = self._plain.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded[0].ids
        return ids

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Yields where special tokens are in a text: the first, then the longest, as the tokenizer
        does."""
        position = 0
        while self._pattern is not None and position < len(text):
            end = position + _SEARCHED
            match = self._pattern.search(text, position, end + self._longest)
            if match is None or match.start() >= end:
                position = end
            else:
                yield match
                position = match.end()

    def _special_texts_in(self, text: str) -> Iterator[str]:
        return (match[0] for match in self._matches(text))

    def _substitute(self, text: str, new_texts: Mapping[str, str]) -> str:
        """Returns a text with other texts in place of special tokens."""
        # not a list of parts: freeing millions of them at once would hold the interpreter
        written, end = io.StringIO(), 0
        for match in self._matches(text):
            written.write(text[end : match.start()])
            written.write(new_texts[match[0]])
            end = match.end()
        if not end:
            return text
        written.write(text[end:])
        return written.getvalue()

    def _replace(self, value: Any, new_texts: Mapping[str, str]) -> Any:
        """Returns a structure with other texts in place of special tokens."""
        if isinstance(value, str):
            return self._substitute(value, new_texts)
        if isinstance(value, Mapping):
            return {
                self._replace(key, new_texts): self._replace(item, new_texts)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._replace(item, new_texts) for item in value]
        return value


def _copy_of(token: tokenizers.AddedToken, content: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not token.special,
        special=False,
    )


def _texts_in(value: Any) -> Iterator[str]:
    """Yields the texts in a structure of lists and dicts, keys included."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)


def _free_characters(texts: list[str], count: int) -> list[str]:
    """Returns private-use characters that are in none of the texts."""
    tried = {chr(secrets.choice(_PRIVATE)) for _ in range(_TRIED + count)}
    free = [character for character in tried if not any(character in text for text in texts)]
    if len(free) < count:
        raise RequestError("the messages hold too many private-use characters", param="messages")
    return free[:count]


def _replace_all(text: str, old: str, new: str) -> str:
    """Returns `text.replace(old, new)`. Other threads may run in between if `old` is one
    character."""
    ends = range(_SEARCHED, len(text) + _SEARCHED, _SEARCHED)
    if not any(text.find(old, end - _SEARCHED, end + len(old)) >= 0 for end in ends):
        return text
    if len(old) > 1:
        return text.replace(old, new)
    parts = range(0, len(text), _SEARCHED)
    return "".join([text[start : start + _SEARCHED].replace(old, new) for start in parts])


def _ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]
