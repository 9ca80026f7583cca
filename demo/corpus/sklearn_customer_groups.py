import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score

rng = np.random.default_rng(8)
centres = np.array([[0, 0], [5, 1], [2, 6]])
customers = np.vstack([rng.normal(centre, 0.8, (100, 2)) for centre in centres])
for groups in (2, 3, 4):
    found = KMeans(groups, n_init=5, random_state=0).fit_predict(customers)
    print(groups, round(silhouette_score(customers, found), 3))
