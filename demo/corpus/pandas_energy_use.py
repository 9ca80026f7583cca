"""Hourly readings to daily means, with a rolling week."""
import pandas as pd

hours = pd.date_range("2024-01-01", periods=24 * 60, freq="h")
readings = pd.Series([10 + hour.hour % 12 + hour.day_of_week for hour in hours], index=hours, name="kwh")

daily = readings.resample("D").mean()
weekly = daily.rolling(7).mean().dropna()
print(daily.head())
print("highest week ends", weekly.idxmax().date(), round(weekly.max(), 2))
