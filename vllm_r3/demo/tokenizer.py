"""A small byte-level tokenizer for the tiny test models, made without any download.

The vocabulary has exactly VOCAB_SIZE entries, so that every id a model can emit has a
text: 256 byte symbols, merges of common letter pairs, then the special tokens. May
import `tokenizers` and `transformers`, lazily.
"""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 512
END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END, START_TURN, END_TURN)
EOS_ID = VOCAB_SIZE - len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_symbols() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def _merges(count: int) -> list[tuple[str, str]]:
    """`count` letter pairs: a space before each letter, then common pairs."""
    space = _byte_symbols()[ord(" ")]
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = [(space, c) for c in letters]
    pairs += [(a, b) for a in letters[:16] for b in letters[:16]]
    return pairs[:count]


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer files and the chat template into `directory`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = _byte_symbols()
    merges = _merges(VOCAB_SIZE - len(symbols) - len(SPECIALS))
    vocab = {s: i for i, s in enumerate([*symbols, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    turns = {
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [START_TURN, END_TURN],
    }
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **turns)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def plain_ids() -> list[int]:
    """Ids whose text is printable ASCII: the ones a tiny model is made to prefer."""
    return [*range(33, 127), *range(256, EOS_ID)]
