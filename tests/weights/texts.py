"""Texts on which tokenizers differ if anything about them differs."""

# ruff: noqa: RUF001

from __future__ import annotations

HARD_TEXTS = (
    "",
    " ",
    "Hello, world!",
    " leading and trailing ",
    "two  spaces   three    four",
    "tabs\t\tand\nnew\n\nlines\r\n\r\nand \n mixed \t\n  ends  ",
    "\n",
    "\n\n\n   \n",
    "numbers 1 12 123 1234 12345 3.14159 1,000,000 0x1F 1e-9",
    "a1b2c3 2024-01-31 10:45 v1.2.3",
    "don't I'm you're we've he'll she'd it's DON'T I'M IT'S ‘it’s’",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    'if (a != b && c >= 10) { printf("%d\\n", x[3]); }',
    "https://example.com/a?b=c&d=%20#frag me@example.org",
    "Größe, naïve café, Ångström, İstanbul, straße",
    "cafe\u0301 A\u030angstro\u0308m",
    "日本語のテキスト、漢字とかな。 한국어 텍스트 中文文本",
    "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया ไทย",
    "emoji 😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ❤️ end",
    "math ∑ᵢ xᵢ² ≤ ∞ x₁",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2028line\ufeffbom",
    "control \x00\x01\x1b[0m \x7f \ufffd",
    "$5.00 + €3 = ¥700; 50% off!!! ... --- *** ___ ~~~ ```code```",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "CamelCaseWords snake_case_words SCREAMING_CASE kebab-case",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_end|> <|im_end|>  <|not_a_token|> </s><s> <s>",
    "<repo_name>x<file_sep>y <jupyter_start>",
    "\ud7ff\ue000 \U0001f9ff\U00010348",
)
# Here it makes a difference whether digits are split off one by one before all else.
DIGITS = ("½ ¾ Ⅷ ٣٤٥ ①②③", "a  1", "x = [\n    1,\n    22]", "\t\t7", "   3", "1  2\n\n3")
