from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

features, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(features, labels, random_state=0)
model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
model.fit(x_train, y_train)
print("accuracy", round(accuracy_score(y_test, model.predict(x_test)), 3))
