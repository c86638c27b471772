"""The course: a page, a file to fill in and a check for each exercise. README.md is for whoever teaches it."""
