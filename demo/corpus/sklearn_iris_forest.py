from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import cross_val_score

iris = load_iris()
forest = RandomForestClassifier(n_estimators=50, random_state=1)
scores = cross_val_score(forest, iris.data, iris.target, cv=5)
print(f"{scores.mean():.3f} ± {scores.std():.3f}")
forest.fit(iris.data, iris.target)
print(max(zip(forest.feature_importances_, iris.feature_names)))
