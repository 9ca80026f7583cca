import numpy as np
from scipy.integrate import solve_ivp


def change(_, state, a=1.0, b=0.1, c=1.5, d=0.075):
    prey, predators = state
    return [a * prey - b * prey * predators, d * prey * predators - c * predators]


solution = solve_ivp(change, (0, 30), [10, 5], t_eval=np.linspace(0, 30, 600), rtol=1e-8)
print("most prey", solution.y[0].max().round(1), "at", solution.t[solution.y[0].argmax()].round(1))
