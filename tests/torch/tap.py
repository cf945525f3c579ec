"""unittest that reports as TAP, for prove."""
import sys
import time
import unittest


class Result(unittest.TestResult):
    def tell(self, test, holds, note=""):
        title = (test.shortDescription() or test.id()).replace("#", "")
        print(f"{'ok' if holds else 'not ok'} {self.testsRun} - {title}{note}", flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.tell(test, True)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.tell(test, True, f" # SKIP {reason}")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.broken(test, error)

    def addError(self, test, error):
        super().addError(test, error)
        self.broken(test, error)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            print(f"# {subtest}", flush=True)
            self.broken(test, error)

    def broken(self, test, error):
        self.tell(test, False)
        for line in self._exc_info_to_string(error, test).splitlines():
            print(f"#   {line}", flush=True)


def main():
    """Runs all tests of the program, or those that its arguments name: Class, Class.test_it."""
    began = time.monotonic()
    loader, module = unittest.TestLoader(), sys.modules["__main__"]
    tests = loader.loadTestsFromNames(sys.argv[1:], module) if sys.argv[1:] else loader.loadTestsFromModule(module)
    print(f"1..{tests.countTestCases()}", flush=True)
    result = Result()
    tests.run(result)
    print(f"# {time.monotonic() - began:.1f} s")
    sys.exit(0 if result.wasSuccessful() else 1)
