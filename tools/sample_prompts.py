"""What the demo and the bench ask when nobody says otherwise: a chat, a code and an arithmetic question.

None of them is in the draft's training set or in an evaluation set.
"""

CHAT = "Explain to a curious child why the sky is blue during the day and red in the evening."
CODE = "Write a Python function that returns the n-th Fibonacci number, with a docstring and an example."
ARITHMETIC = (
    "A shop sells pens at 3 dollars each. Anna buys 12 pens and pays with 50 dollars. What is her change?"
)

SAMPLE_PROMPTS = (CHAT, CODE, ARITHMETIC)
