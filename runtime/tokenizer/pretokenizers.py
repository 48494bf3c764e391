"""How each family of byte-level BPE tokenizers cuts a text into words before merging: `tokenizer.ggml.pre`.

The names are the ones GGUF converters write. The rules are those of each family's tokenizer.json on the hub,
so that ids equal Hugging Face's; where it normalizes to Unicode NFC, so does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(suffix: str, digits: str) -> str:
    """Words split where upper case follows lower case."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}{_UPPER}*{_LOWER}+{suffix}|{head}{_UPPER}+{_LOWER}*{suffix}|{digits}{_CASED_TAIL}"


_GPT4O = _cased(_CONTRACTION + "?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    r"ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Steps in order, each cutting the pieces of the step before: a regular expression (Oniguruma) whose
    matches stand alone, or "digits" (each alone), "numbers" (runs), "punctuation" (runs), "gpt2" (GPT-2's
    own expression).

    nfc: normalize first. ignore_merges: a word that is a whole token is that token, whatever the merges say.
    add_bos: the default where the file does not say.
    """

    steps: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    aliases: tuple[str, ...] = field(default=(), kw_only=True)

    def install(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Regex, normalizers, pre_tokenizers

        def built(step: str) -> pre_tokenizers.PreTokenizer:
            if step == "digits":
                return pre_tokenizers.Digits(individual_digits=True)
            if step == "numbers":
                return pre_tokenizers.Digits(individual_digits=False)
            if step == "punctuation":
                return pre_tokenizers.Punctuation(behavior="contiguous")
            if step == "gpt2":
                return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            return pre_tokenizers.Split(Regex(step), behavior="isolated")

        steps = [built(step) for step in self.steps]
        if "gpt2" not in self.steps:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if self.nfc:
            tokenizer.normalizer = normalizers.NFC()


_GPT2_ALIASES = (
    "phi-2",
    "jina-es",
    "jina-de",
    "jina-v2-es",
    "jina-v2-de",
    "jina-v1-en",
    "jina-v2-code",
    "roberta-bpe",
    "gigachat",
    "a.x-4.0",
    "mellum",
    "exaone4",
    "jais",
    "trillion",
    "granite-docling",
    "default",
)

FAMILIES: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(("gpt2",), aliases=_GPT2_ALIASES),
    "gpt-neox": PreTokenizer(("gpt2",), nfc=True, aliases=("olmo", "mpt", "modern-bert")),
    "starcoder": PreTokenizer(
        ("digits", "gpt2"), aliases=("refact", "smollm", "codeshell", "exaone", "minerva-7b")
    ),
    "command-r": PreTokenizer(("digits", "gpt2"), nfc=True),
    "llama-bpe": PreTokenizer(
        (_LLAMA3,),
        ignore_merges=True,
        add_bos=True,
        aliases=("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ),
    "dbrx": PreTokenizer((_LLAMA3,), aliases=("smaug-bpe", "glm4", "chatglm-bpe")),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "stablelm2": PreTokenizer(
        (_QWEN2,),
        aliases=("deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"),
    ),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bailingmoe": PreTokenizer((_BAILING,), aliases=("bailingmoe2", "llada-moe")),
    "gpt-4o": PreTokenizer((_GPT4O,), aliases=("llama4", "kanana2", "minimax-m2")),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "falcon": PreTokenizer(("punctuation", "gpt2", "numbers", "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _CJK, "digits")
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, "digits")),
    "deepseek-v3": PreTokenizer(
        (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3), aliases=("hunyuan-dense", "joyai-llm")
    ),
    "bloom": PreTokenizer((_BLOOM,), aliases=("poro-chat", "gpt3-finnish")),
    "viking": PreTokenizer((_BLOOM, "digits")),
}

PRETOKENIZERS: Mapping[str, PreTokenizer] = {
    name: family for first, family in FAMILIES.items() for name in (first, *family.aliases)
}
