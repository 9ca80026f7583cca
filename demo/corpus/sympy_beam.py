"""Deflection of a beam under its own weight, solved by symbols."""
from sympy import Eq, Function, dsolve, latex, simplify, symbols

x, q, length, stiffness = symbols("x q L EI", positive=True)
w = Function("w")
solution = dsolve(
    Eq(stiffness * w(x).diff(x, 4), q),
    ics={w(0): 0, w(length): 0, w(x).diff(x, 2).subs(x, 0): 0, w(x).diff(x, 2).subs(x, length): 0},
)
print(simplify(solution.rhs.subs(x, length / 2)))
print(latex(solution.rhs))
