"""The browser of the page's tests."""

from page.test_browser import browser as browser
