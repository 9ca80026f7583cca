import sympy as sp

x, a = sp.symbols("x a", positive=True)
for expression in (x**2 * sp.exp(-a * x), sp.sin(x) ** 2, 1 / (1 + x**2)):
    print(expression, "→", sp.simplify(sp.integrate(expression, x)))
print(sp.integrate(sp.exp(-(x**2)), (x, -sp.oo, sp.oo)))
