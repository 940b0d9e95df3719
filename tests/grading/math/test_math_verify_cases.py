r"""The cases that math-verify publishes for its comparison, and what our `math` grader says to them.

Source: github.com/huggingface/Math-Verify, `tests/test_all.py` (commit cf14bc4), `tests/test_yujianll.py`
(commit 056ad62) and `tests/test_mixed_number_extraction.py` (commit 05aa3a6), Apache-2.0. Of cases with prose
around a box the sentence with the box is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kapelle.grading.math.grade import grade_math, math_processes
from kapelle.grading.processes import AnswerLimits, KillableProcesses

SAME = [
    (
        r"\begin{pmatrix}6 & 8 \\ 10 & 12\end{pmatrix}",
        r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix} + \begin{pmatrix}5 & 6 \\ 7 & 8\end{pmatrix}",
    ),
    (r"10/9", r"\frac{10}{9}"),
    (r"-10/9", r"-\frac{10}{9}"),
    (r"[0,1)", r"[0,1)"),
    (r"9", r"9"),
    (r"10", r"(9+1)"),
    (r"1/3", r"\frac13 "),
    (r"1", r"\frac3{3} "),
    (r"\sqrt{3}", r"\sqrt3 "),
    (r"1/3", r"\cfrac{1}{3} "),
    (r"1/3", r"\dfrac{1}{3} "),
    (r"1/3", r"\tfrac{1}{3} "),
    (r"1/3", r" 1/3 "),
    (r"1/3", r"\left( \frac{1}{3} \right)"),
    (r"1/3", r"\frac{1}{3} \text{meters}"),
    (r"1/3", r"k = \frac{1}{3}"),
    (r"x \leq 5", r"5 \geq x"),
    (r"x \geq 5", r"5 \leq x"),
    (r"x < 1", r"-x > -1"),
    (r"11", r"x=11"),
    (r"k=1", r"1"),
    (r"1", r"k=1"),
    (r"2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"),
    (r"x^2/4 + y^2/3 = 1", r"x^2/16 + y^2/12 = 1/4"),
    (r"34x+45y-20z+100=0", r"-34x-45y+20z-100=0"),
    (r"\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}", r"\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}"),
    (r"\begin{bmatrix}0 & 0 \\0 & 0\end{bmatrix}", r"\begin{pmatrix}0 & 0 \\0 & 0\end{pmatrix}"),
    (
        r"\begin{pmatrix}\frac{1}{2} & \frac{3}{4} \\ \frac{5}{6} & \frac{7}{8}\end{pmatrix}",
        r"\begin{pmatrix}\frac{1}{2} & \frac{3}{4} \\ \frac{5}{6} & \frac{7}{8}\end{pmatrix}",
    ),
    (r"(1,\frac{9}{2})", r"(1,4.5)"),
    (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}"),
    (r"\tan^2(y)+1", r"\sec^2(y)"),
    (
        r"\frac{\sqrt{\sqrt{11}+\sqrt{194}}}{15+2\sqrt{33}}",
        r"\frac{\sqrt{\sqrt{11}+\sqrt{194}}}{2\sqrt{33}+15}",
    ),
    (r"[-4,0]", r"[-4, 0]"),
    (r"(2, 12) \cup (12, 102)", r"(2,12) \cup (12,102)"),
    (r"\text{E}", r"E"),
    (r"\text{C}", r"\text{(C)}"),
    (r"11111111100", r"11,\! 111,\! 111,\! 100"),
    (r"32349", r"32,\! 349"),
    (r"n=1, 2, 3", r"n=1, 2, 3"),
    (r"D = (0, 1)", r"D = (0, 1)"),
    (r"F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1}", r"F_n = \sum_{k=0}^{n-1} F_{n-k-1} F_k"),
    (r"19, 46, and 82", r"19, 46, \text{ and } 82"),
    (r"1 - \frac{1}{\mathrm{e}}", r"1 - \frac{1}{\mathrm{e}}"),
    (r"12:00", r"12:00"),
    (r"\frac{1}{3}", r"\frac{1}{3}."),
    (r"\sqrt{2}", r"\sqrt{2}."),
    (r"(1,2)", r"(1,2)."),
    (r"5", r"5 \text{ cm}."),
    (r"42", r"42."),
    ("-5", "-5"),
    ("7425000", "7,425,000"),
    ("1000", "1000.0"),
    ("1000.0", "1,000.0"),
    ("0.4", ".4"),
    ("1000.99", "1,000.99"),
    ("1000.99", "$1,000.99"),
    ("1000.99", "1,000.99$"),
    ("1000.99", "1,000.99€"),
    ("9", r"\[ 9 \]"),
    ("9", r"$$ 9 $$"),
    ("9", r"\( 9 \)"),
    ("9", "$$ \n 9 \n $$"),
    ("9", "\\[ \n 9 \n \\]"),
    ("1/3", r"\frac{1}{3} \textbf{meters}"),
    (r"28\%", "28 percent"),
    (r"28\%", "28 pct"),
    (r"28\%", "28 %"),
    (r"28\%", "28"),
    (r"\pm 2021", "{-2021, 2021}"),
    (r"1 = \zzz = x = 0", "0"),
    (r"x >= 5", r"x \geq 5"),
    (r"x < 3", r"x \lt 3"),
    (r"x \leq 2", r"x <= 2"),
    (r"x > 5", r"x \gt 5"),
    (r"x != 3", r"x \neq 3"),
    (r"x <= 1", r"-x >= -1"),
    (
        r"\begin{pmatrix}1 & 2 \\3 & 4\end{pmatrix}",
        r"\left[\begin{array}{cc}1 & 2 \\3 & 4\end{array}\right]",
    ),
    (
        r"\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}",
        r"\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix} \begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}",
    ),
    ("40/9", "4 4/9"),
    ("-40/9", "-4 4/9"),
    ("71/6", "11 5/6"),
    ("71/6", "+11 5/6"),
    ("4/9", "0 4/9"),
    ("4", "4 0/9"),
    ("40/9", "4 + 4/9"),
    ("5", "10/2"),
    ("5", "$5.00"),
]

BOXED = [
    (r"28\%", r"$\boxed{28}$ pct"),
    (r"28\%", r"$\boxed{28 pct}"),
    (r"28\%", r"$\boxed{28 percent}"),
    (r"28\%", r"$\boxed{28 percentage}"),
    (r"28\%", r"$.8\cdot .9x = .72x$, making for a total loss of $\boxed{28\%}$."),
    ("1/3", r"$\boxed{\frac{1}{3}}$"),
    ("2-2p", r"If $2-x=p$, then $x=2-p$. Thus $x-p=\boxed{2-2p}$."),
    (
        r"\begin{pmatrix} 0 & 3 \\ 0 & -1 \end{pmatrix}",
        "\\boxed{\n\\begin{pmatrix} 0 & 3 \\\\ 0 & -1 \\end{pmatrix}\n}.\n\\end{align*}",
    ),
    ("14,916", r"Therefore, $\boxed{14{,}916}$ is our answer."),
    (r"12\text{ and }13", r"the graph of the sum is located between $\boxed{12 $ and $13 }. $"),
    (
        r"(3, \frac{\pi}{2})",
        r"Therefore, the polar coordinates are $\boxed{\left( 3, \frac{\pi}{2} \right)}.$",
    ),
    (r"\frac{14}{3}", r"$\frac{-8}{-4}+\frac{-5}{-3}+\frac{-2}{-2}=2+\frac{5}{3}+1=\boxed{\frac{14}{3}}$"),
    (r"\text{Evelyn}", r"Therefore, $\boxed{\text{Evelyn}}$ is our answer."),
    (r"90^\circ", r"Hence, the angle between the lines is $\boxed{90^\circ}.$"),
    (r"90^\circ", r"\angle BAC &= 50^\circ+40^\circ \\ &= \boxed{90^\circ}. \end{align*}"),
    (r"3\sqrt{13}", r"&= \sqrt{36 + 81}\\ & = \sqrt{117} = \boxed{3\sqrt{13}}. \end{align*}"),
    (r"\frac{3}{56}", r"\[p(8) = \frac{q(8) + 8}{8^2 - 1} = \boxed{\frac{3}{56}}.\]"),
    ("2", r"Thus, there are $\boxed{2}$ distinct possible values for $B$."),
    (r"15\mbox{ cm}^2", r"$$\frac{1}{2}\times 3 \times 10 = \boxed{15\mbox{ cm}^2}.$$"),
    ("-2,1", r"we find that the only integer roots are $\boxed{-2,1}.$"),
    ("9", r"Then, $129^{34}+96^{38} \equiv \boxed{9} \pmod{11}.$"),
    ("0", r"Hence, the degree of $p(x)$ (which is the constant polynomial 1) is $\boxed{0}.$"),
    (
        "204_5",
        r"for a quotient of $\boxed{204_5}$. Note that we have used that $13_5$ divided by $2_5$ is $4_5$",
    ),
    ("(6,31,-1)", r"we find $(p,q,r) = \boxed{(6,31,-1)}.$"),
    (r"1 \pm \sqrt{19}", r"By the quadratic formula, $x = \boxed{1 \pm \sqrt{19}}.$"),
    (r"3 \pm 2 \sqrt{2}", r"By the quadratic formula, the roots are $x = \boxed{3 \pm 2 \sqrt{2}}.$"),
    (r"\{1\pm\sqrt{5},-2\}", r"so the answer is $\boxed{\{1\pm\sqrt{5},-2\}}.$"),
    ("f(2) < f(1) < f(4)", r"Hence, $\boxed{f(2) < f(1) < f(4)}.$"),
    (r"2 \sin b \cos a", r"\[\sin (a + b) - \sin (a - b) = \boxed{2 \sin b \cos a}.\]"),
    (r"\frac{\pi r}{h+r}", r"The answer is $\boxed{\frac{\pi r}{h+r}}$."),
    (r"125\text{ miles}", r"The distance is $\boxed{125\textnormal{ miles}}.$"),
    (
        r"[-1, -\frac{1}{2}) \cup (-\frac{1}{2}, 0) \cup (0, 1) \cup (1, \infty)",
        r"The solution set is $\boxed{[-1, -\tfrac12) \cup (-\tfrac12, 0) \cup (0, 1) \cup (1, \infty)}.$",
    ),
    (r"\sqrt{2}+\sqrt{5}", r"The answer is $\boxed{\sqrt 2+\sqrt 5}$"),
    (r"\frac{9}{4}\pi", r"Therefore $\boxed{\frac94\pi}$."),
    (r"\{-1\} \cup [0,7)", r"x \in \boxed{\{-1\} \cup [0,7)}.$"),
    ("189", r"Thus, the area of the trapezoid is \(\boxed{189}\) square centimeters."),
]
"""Published as the same, with words around a box."""

HUNDREDTHS = [("40/900", "4 4/9%"), ("40/900", "4 4/9 percentage"), ("40/900", "4 4/9pct"), ("7/25", "28%")]
"""The library's reading of a percent sign, which is ours where `percent` says so."""

DIFFERENT = [
    (r"[0,9)", r"[0,1)"),
    (r"(0,9)", r"[0,9)"),
    (r"1", r"-[0,1)"),
    (r"x > 5", r"x < 5"),
    (r"x \geq 5", r"x \leq 5"),
    (r"x < 1", r"x > -1"),
    (r"7 = 11a+c", r"11a+c"),
    (r"a +3z = 0", r"0"),
    (r"2x + z = 1", r"1"),
    (r"a^2 + b = 0", r"0"),
    (r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}", r"\begin{pmatrix}1 & 2 \\ 3 & 5\end{pmatrix}"),
    (r"(a+5)(b+2)", r"(+5)(b+2)"),
    (r"2", r"\frac{1+\sqrt{5}}{2}"),
    (r"4", r"\frac{34}{16}+\frac{\sqrt{1358}}{16}"),
    (r"1\sqrt{19}", r"1"),
    (r"x+2n+1", r"x+1"),
    (r"4", r"4\sqrt{2}"),
    (r"1112112_3", r"1112122_3"),
    (r"32349", r"32, 349"),
    (r"n=2, 3, 4", r"n=1, 2, 3"),
    (r"D = (0, 1)", r"D = (0, 1.5)"),
    (r"F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1}", r"F_n = \sum_{k=0}^{n-2} F_k F_{n-k-2}"),
    (r"19, 46, and 82", r"21, 36, and 82"),
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"),
    (r"\pm 2021", r"2021"),
    (r"12:00", r"1:00"),
    (r"2", r"2^{10}."),
    (r"1", r"1/3."),
    (r"1, 2, 3", r"1, 2, 3, ..."),
    (r"0.28", r"28"),
    (r"28/100", r"28"),
    (r"28", r"28/100"),
    (r"\frac{28}{100}", r"28"),
    (r"28*\frac{1}{100}", r"28"),
    ("2", "AZYUK2A"),
    ("4", "4 4/9"),
    *(
        (gold, f"{sign}4 {part}")
        for gold in ("4", "0", "-4")
        for sign in ("", "-")
        for part in ("4/0", "0/0")
    ),
    *((gold, "11 6/6") for gold in ("11", "1", "12", "10")),
    *((gold, "11 7/6") for gold in ("11", "7/6", "73/6", "59/6")),
    ("139/90", "11/10 4/9"),
    ("103/9", "11.0 4/9"),
    ("103/9", "(11) 4/9"),
    ("139/90", "11/10\n4/9"),
    ("71/6", "11\n5/6"),
    ("95/9", "11 + 4/9"),
]

DEVIATIONS = [
    ("1000.99", "1000,99", "a comma is no decimal point: 1,2 would be a pair and a number"),
    ("1,22", "1.22", "as above"),
    ("x = 11", "x = 5+5+1 = 7 =11", "an answer that contradicts itself names no value"),
    ("1/3", r"x=1/3\approx1.3", "an answer with an approximation names two values"),
    ("11", r"x\approx11", "an approximation is not the value"),
    (r"\frac{1}{12}", "0.0833333333333333", "a decimal is not the fraction that it rounds"),
    (r"\frac{1}{3}", "0.3333", "as above (published with a precision of 4)"),
    (r"(\frac{3}{5},\frac{8}{3}]", "(0.6,2.6667]", "as above (published with a precision of 2)"),
    ("4.123105625617661", r"\sqrt{17}", "as above"),
    ("z = 1 + 1 = 2", "z = 3+3 = 2", "as `x = 11`"),
    ("x = 1/3", r"x = 5+5+1 = 1/3 \approx 11", "as above"),
    ("0,111", "0.111", "a comma is no decimal point"),
    ("2.74", "Soucis : 2,74 $ a..", "as above, and the last number of prose is not searched for"),
    ("1000", "1 000", "a space groups no digits: 1 0 would be two values and a number"),
    ("9004/9", "1 000 4/9", "as above"),
    ("1000.99", "1,000.99m²", "a superscript is a power: the unit is read as `m^2`, not the square of `m`"),
    ("9", r"Answer \[ 9 \]", "a formula in prose is not searched for: box or tag it"),
    ("10/9", r"$ \frac{1}{2} \$ = \frac{10}{9} $", "an equation that does not hold names no value"),
]
"""Published as the same; not paid for here, with the reason."""


@pytest.fixture(scope="module")
def patient_pool() -> Iterator[KillableProcesses]:
    """Time enough for the two sums, which take the library more than a second."""
    with math_processes(size=1, limits=AnswerLimits(cpu_s=20.0, wall_s=60.0)) as pool:
        yield pool


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_published_as_the_same(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    grade = grade_math(answer, gold, ["whole"], patient_pool)
    assert grade.score == 1.0, grade


@pytest.mark.parametrize(("gold", "answer"), BOXED)
def test_published_as_the_same_in_prose(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    grade = grade_math(answer, gold, ["only_box"], patient_pool)
    assert grade.score == 1.0, grade


@pytest.mark.parametrize(("gold", "answer"), HUNDREDTHS)
def test_published_percentages(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    assert grade_math(answer, gold, ["whole"], patient_pool, "hundredths").score == 1.0
    assert grade_math(answer, gold, ["whole"], patient_pool, "figure").score == 0.0


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_published_as_different(gold: str, answer: str, patient_pool: KillableProcesses) -> None:
    grade = grade_math(answer, gold, ["whole"], patient_pool)
    assert grade.score == 0.0, grade
    assert grade.status != "ungraded", grade


@pytest.mark.slow
@pytest.mark.parametrize(("gold", "answer", "reason"), DEVIATIONS)
def test_published_as_the_same_and_not_paid_for(
    gold: str, answer: str, reason: str, patient_pool: KillableProcesses
) -> None:
    assert reason
    assert grade_math(answer, gold, ["whole"], patient_pool).score == 0.0
